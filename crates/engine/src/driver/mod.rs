//! Many conversations at once: who computes next, and what is kept for later prompts.

pub(crate) mod crowd;
pub(crate) mod prefix;
