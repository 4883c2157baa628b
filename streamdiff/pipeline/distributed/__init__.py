"""Messages from rank to rank: a sender and a receiver for each transport, as `link` has them; rendezvous and health."""
