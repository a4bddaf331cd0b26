"""The project's main job at a size that two CPU cores do in minutes, offline."""
