"""Random models, layouts and options, each against one process of transformers, autograd and torch's optimizers.

    .venv/bin/python -m net [FIRST [LAST]]        from this folder; MCA_NET_SEED=n for other draws

`test_option_net.py` runs a small fixed sample of them; ``MCA_NET_CASES=400`` so many, ``MCA_NET_ONLY=17,31`` those.
"""
