"""All settings are in pyproject.toml; this file lets `python setup.py` style tools work."""

from setuptools import setup

setup()
