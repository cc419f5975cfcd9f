"""Documents that are tokenised by the workers, without a pass over their lengths beforehand.

stream.py      `PackStream`: rows of tokens, packed as the documents are read
lengths.py     `lengths_of`: one pass over the lengths, kept in a file, for samplers that need them
"""
