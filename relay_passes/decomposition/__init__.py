"""Chains of smaller layers, and what is moved around them."""
