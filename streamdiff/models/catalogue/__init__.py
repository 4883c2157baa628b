"""Published models: what each is, where its files lie, and how it is run."""
