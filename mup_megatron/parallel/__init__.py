"""How ranks share a model: layout, stages, process groups, and how ranks are started."""
