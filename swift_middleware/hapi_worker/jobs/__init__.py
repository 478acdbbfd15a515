"""One job, from the request body to the feature stream.

In: a job request and the bytes of its source. Out: an Arrow stream and the
job's usage record.
"""
