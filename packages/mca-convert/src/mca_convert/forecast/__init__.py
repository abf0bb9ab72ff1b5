"""Forecast of a conversion: sizes, files, memory and errors, without reading tensors or writing files."""
