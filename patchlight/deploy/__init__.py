"""Models for other engines: exported, proven, loaded again."""
