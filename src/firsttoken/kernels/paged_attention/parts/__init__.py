"""Parts of a row whose keys several programs share."""
