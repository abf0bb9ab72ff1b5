"""Report of a finished or running run as one HTML page without external files."""
