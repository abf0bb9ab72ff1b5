"""Hydra configurations: ``hydra.searchpath=[pkg://mca_train.clients.verl.config]`` makes ``engine=mca`` known."""
