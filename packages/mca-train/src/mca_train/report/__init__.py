"""A finished or running run as one page that needs no network."""
