"""Times of other implementations on the same GPU, taken in a process of their own: see `__main__`."""
