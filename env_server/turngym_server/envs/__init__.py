"""The environments that come with turngym, one file each."""
