"""Passes that replace layers by chains of smaller ones, and that move layers around such chains."""
