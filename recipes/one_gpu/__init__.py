"""Train and measure the published setting on one rented GPU, within a stated budget."""
