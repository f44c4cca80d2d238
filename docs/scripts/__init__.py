"""Scripts that maintain the project and are not part of the package."""
