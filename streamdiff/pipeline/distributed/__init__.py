"""How works get from rank to rank: one class for each transport, all with the contract of `link.Link`."""
