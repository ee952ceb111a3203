"""Tars: an index that finds members, a strict reader, and a store over them."""
