"""What maintains the project, and is no part of the package."""
