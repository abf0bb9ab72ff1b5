"""Datasets: from files to tokenized samples. The package ``batching`` makes batches of them."""
