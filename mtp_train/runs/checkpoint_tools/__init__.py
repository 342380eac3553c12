"""Operations on checkpoints that train nothing."""
