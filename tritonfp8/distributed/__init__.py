"""Sharding rules and FP8 collectives. The core never imports this subpackage."""
