"""report.html: one run on one page that asks nothing of the network."""
