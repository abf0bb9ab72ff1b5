"""Parts that several families share: parameters, config.json facts and values, one module for each feature."""
