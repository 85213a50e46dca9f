"""What is replayed: recorded calls, random shapes, published lists of shapes."""
