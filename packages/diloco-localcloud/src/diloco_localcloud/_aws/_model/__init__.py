"""AWS's own model of requests and answers, as shipped with botocore."""
