"""A state whose leaves lie on a mesh of devices, and the words by which a step says what moves between them."""
