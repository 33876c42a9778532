"""Thousands of ranks through the planning core, without samples: what batching would come to."""
