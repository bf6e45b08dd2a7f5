"""Files and disks that are not there."""
