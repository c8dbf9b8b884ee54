"""Configuration: how it is composed, what is built from it, and what of it a run folder keeps."""
