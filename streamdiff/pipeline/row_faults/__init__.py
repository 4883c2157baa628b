"""One row's failure is its own: which errors are, and how a stage and the head of a ring keep them from the others."""
