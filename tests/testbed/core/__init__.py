"""The core alone: worlds of engines, and disks that are numbers."""
