//! Conversations that are kept, so that a prompt which begins like one of them is not computed again.

use std::path::PathBuf;

/// What is kept, and where.
#[derive(Clone, Debug)]
pub struct PrefixOptions {
    /// The most bytes of memory. They are part of the budget: expert slots give them.
    pub memory: u64,
    /// A folder for what leaves memory, and for the next start.
    pub folder: Option<PathBuf>,
    /// The most bytes of files of one model there.
    pub disk: u64,
}

/// Counted since the start, but for what is there now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixMeters {
    /// Conversations in memory.
    pub entries: usize,
    /// What they take.
    pub bytes: u64,
    /// Conversations on disk.
    pub disk_entries: usize,
    /// What they take.
    pub disk_bytes: u64,
    /// Prompts that began like something kept.
    pub hits: u64,
    /// Prompts that did not.
    pub misses: u64,
    /// Tokens that were not computed again.
    pub tokens_reused: u64,
    /// Conversations that left memory for want of room.
    pub evictions: u64,
    /// Conversations written to disk.
    pub writes: u64,
    /// Conversations read from disk.
    pub loads: u64,
    /// Files that could not be written, or could not be used.
    pub failures: u64,
}
