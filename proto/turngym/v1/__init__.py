"""Version 1 of the contract: messages in `environment_pb2`, service stubs in `environment_pb2_grpc`."""
