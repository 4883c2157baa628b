"""Weight files: finding, opening and checking them, whatever their layout."""
