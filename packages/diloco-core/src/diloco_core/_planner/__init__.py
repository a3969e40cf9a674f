"""What a sync will cost: an estimate, made before a machine is paid for."""
