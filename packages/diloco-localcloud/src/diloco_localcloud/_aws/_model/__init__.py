"""What AWS's own service model says of requests and answers, as shipped with botocore."""
