"""Video jobs: kept in a folder, made by the running engine in the time that live sessions leave."""
