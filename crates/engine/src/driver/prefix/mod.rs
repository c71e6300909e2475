//! The prefix cache: conversations that are kept, so that a later prompt with the same beginning need not be computed
//! again.
//!
//! The cache finds the conversation that shares the longest usable prefix with a prompt. A prompt that continues a
//! conversation takes it out of the cache, and puts it back longer. A prompt that shares only the beginning, such as a
//! system prompt, gets a fork. Each tenant finds only its own conversations, so token counts and timing reveal nothing
//! about other tenants. When memory is short, the least recently used conversation is evicted first. It is written to
//! disk (`disk.rs`), if a folder is set.

mod disk;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use disk::Disk;
pub use disk::Ticket;

use crate::TokenId;
use crate::engine::Engine;
use crate::error::{Bytes, Error};
use crate::generate::client::Tenant;
use crate::memory::Purpose;
use crate::session::Session;

/// A conversation that is unused for this long is written to disk, so that a crash does not lose it.
const WRITTEN_AFTER: Duration = Duration::from_secs(20);

/// A file must save at least this many tokens to be read. For fewer tokens, computing is about as fast.
const GAIN: usize = 128;

/// All prompts share their first few tokens. A fork for fewer tokens than this costs more than it saves.
pub const WORTH_FORKING: usize = 16;

/// Options of the prefix cache.
///
/// # Examples
/// ```
/// use forebay_engine::chat::Message;
/// use forebay_engine::{ChatRequest, Driver, DriverOptions, PrefixOptions};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// let mut options = DriverOptions::new(1);
/// options.crowd.prefixes = Some(PrefixOptions::new(&engine, None));
/// let driver = Driver::start(&engine, options)?;
///
/// let mut messages = vec![Message::new("user", "Tell me a story.")];
/// let first = driver.chat(ChatRequest::new(messages.clone()).max_tokens(4))?.whole()?;
/// messages.extend([first.message(), Message::new("user", "Go on.")]);
/// let second = driver.chat(ChatRequest::new(messages).max_tokens(4))?.whole()?;
/// assert!(second.answer.stats.reused_tokens > 0);
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PrefixOptions {
    /// The most bytes of memory. They are part of the budget and come from expert slots.
    pub memory: u64,
    /// A folder for conversations that are evicted from memory, and for the next start.
    pub folder: Option<PathBuf>,
    /// The most bytes of files in the folder, including other models'.
    pub disk: u64,
    /// The number of tokens that a file must save to be read.
    pub gain: usize,
}

impl PrefixOptions {
    /// Memory for one conversation as reserved by the plan, or a sixteenth of the budget if that is more; 8 GiB on
    /// disk.
    pub fn new(engine: &Engine, folder: Option<PathBuf>) -> PrefixOptions {
        let plan = engine.plan();
        let memory = plan.kv.max(plan.total() / 16);
        PrefixOptions { memory, folder, disk: 8 << 30, gain: GAIN }
    }
}

/// Counters of the prefix cache. The first four are current values, the others count since the start.
///
/// # Examples
/// ```
/// use forebay_engine::{Crowd, CrowdOptions, PrefixMeters, PrefixOptions};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// let mut options = CrowdOptions::new(1);
/// options.prefixes = Some(PrefixOptions::new(&engine, None));
/// let crowd = Crowd::new(&engine, options);
/// let PrefixMeters { entries, hits, misses, .. } = crowd.prefix_meters();
/// assert_eq!((entries, hits, misses), (0, 0, 0));
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixMeters {
    /// Conversations in memory.
    pub entries: usize,
    /// Bytes of conversations in memory.
    pub bytes: u64,
    /// Conversations on disk.
    pub disk_entries: usize,
    /// Bytes of conversations on disk.
    pub disk_bytes: u64,
    /// Prompts that shared a beginning with a kept conversation.
    pub hits: u64,
    /// Prompts that did not.
    pub misses: u64,
    /// Tokens that did not have to be computed again.
    pub tokens_reused: u64,
    /// Conversations that were evicted from memory.
    pub evictions: u64,
    /// Conversations written to disk.
    pub writes: u64,
    /// Conversations read from disk.
    pub loads: u64,
    /// Files that could not be written or used.
    pub failures: u64,
}

/// The prefix cache.
pub struct Prefixes {
    options: PrefixOptions,
    /// Ordered by last use, most recent last.
    kept: Vec<Kept>,
    disk: Option<Disk>,
    meters: PrefixMeters,
}

struct Kept {
    tenant: Tenant,
    session: Session,
    /// Where its last turn begins.
    turn: usize,
    used: Instant,
    /// Whether it is on disk, or being written.
    written: bool,
}

/// A kept conversation that shares its beginning with a text.
#[derive(Clone, Copy, Debug)]
pub struct Match {
    /// Its index.
    pub index: usize,
    /// The number of shared tokens.
    pub same: usize,
    /// The longest shared prefix that the conversation can be rewound to.
    pub reach: usize,
}

/// The result of freeing memory for running requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// Memory was freed.
    Made,
    /// Memory will be freed soon.
    Soon,
    /// There is nothing left to free.
    None,
}

impl Match {
    /// The better of two matches.
    pub fn best(matches: impl Iterator<Item = Match>) -> Option<Match> {
        matches.max_by_key(|found| (found.reach, found.same))
    }
}

impl Prefixes {
    /// Reads the folder's index. If the folder cannot be used, logs a warning and keeps conversations in memory only.
    pub fn new(engine: &Engine, options: PrefixOptions) -> Prefixes {
        let mut meters = PrefixMeters::default();
        let disk = options.folder.as_deref().and_then(|folder| {
            let opened = Disk::open(engine, folder, options.disk, &mut meters);
            opened.inspect_err(|error| tracing::warn!("the prefix cache on disk is off: {error}")).ok()
        });
        Prefixes { options, kept: Vec::new(), disk, meters }
    }

    /// The tenant's conversation in memory that shares the longest beginning with a text. At least the text's last
    /// token must be computed.
    pub fn find(&self, tenant: Tenant, text: &[TokenId]) -> Option<Match> {
        let of_tenant = self.kept.iter().enumerate().filter(|(_, kept)| kept.tenant == tenant);
        Match::best(of_tenant.map(|(index, kept)| {
            let same = common(kept.session.tokens(), text);
            let reach = kept.session.reach(same.min(text.len() - 1));
            let pays = reach >= WORTH_FORKING || reach >= kept.turn;
            Match { index, same, reach: if pays { reach } else { 0 } }
        }))
    }

    /// The same for conversations on disk.
    pub fn find_on_disk(&self, tenant: Tenant, text: &[TokenId]) -> Option<Match> {
        self.disk.as_ref().and_then(|disk| disk.find(tenant, text))
    }

    /// The tokens of a conversation that was found in memory.
    pub fn tokens(&self, index: usize) -> &[TokenId] {
        self.kept[index].session.tokens()
    }

    /// The tokens of a conversation that was found on disk.
    pub fn tokens_on_disk(&self, index: usize) -> &[TokenId] {
        self.disk.as_ref().map_or(&[], |disk| disk.tokens(index))
    }

    /// Whether a file that saves this many tokens is worth reading.
    pub fn is_worth_reading(&self, saves: usize) -> bool {
        saves >= self.options.gain
    }

    /// A session with the shared tokens of a conversation that was found in memory.
    pub fn take(&mut self, found: Match) -> Session {
        let mut kept = self.kept.remove(found.index);
        kept.used = Instant::now();
        let continued = found.reach >= kept.turn;
        let written =
            self.disk.as_ref().is_some_and(|disk| disk.is_writing_of(kept.tenant, kept.session.tokens()));
        if !continued || written {
            match kept.session.fork_at(found.reach) {
                Ok(fork) => {
                    self.kept.push(kept);
                    return fork;
                }
                Err(error) => tracing::debug!("a kept conversation is cut to its prefix: {error}"),
            }
        }
        kept.session.go_back(found.reach);
        kept.session.hold_for(Purpose::Conversations);
        kept.session
    }

    /// Starts to read a conversation that was found on disk.
    pub fn read(&mut self, index: usize) -> Option<Ticket> {
        self.disk.as_mut().and_then(|disk| disk.read(index))
    }

    /// Conversations that have been read, or `None` for those that could not be. Waits up to `wait` for one.
    pub fn arrived(&mut self, wait: Duration) -> Vec<(Ticket, Option<Session>)> {
        self.disk.as_mut().map_or_else(Vec::new, |disk| disk.arrived(wait, &mut self.meters))
    }

    /// Counts a prompt, and its tokens that were not computed again.
    pub fn count(&mut self, reused: usize) {
        if reused > 0 {
            self.meters.hits += 1;
        } else {
            self.meters.misses += 1;
        }
        self.meters.tokens_reused += reused as u64;
    }

    /// Keeps a tenant's conversation whose last turn begins after `turn` tokens.
    pub fn keep(&mut self, tenant: Tenant, mut session: Session, turn: usize) {
        let tokens = session.tokens();
        let is_longer = |kept: &Kept| kept.tenant == tenant && kept.session.tokens().starts_with(tokens);
        if let Some(longer) = self.kept.iter().position(is_longer) {
            let longer = self.kept.remove(longer);
            self.kept.push(longer);
            return;
        }
        self.kept.retain(|kept| kept.tenant != tenant || !tokens.starts_with(kept.session.tokens()));
        session.hold_for(Purpose::Prefixes);
        self.kept.push(Kept { tenant, session, turn, used: Instant::now(), written: false });
        while self.bytes() > self.options.memory {
            let Kept { tenant, mut session, written, .. } = self.kept.remove(0);
            self.meters.evictions += 1;
            if let Some(disk) = self.disk.as_mut().filter(|_| !written) {
                disk.write(tenant, &mut session);
            }
        }
    }

    /// Frees memory for running requests.
    pub fn give_way(&mut self) -> Room {
        if !self.kept.is_empty() {
            let Kept { session, .. } = self.kept.remove(0);
            tracing::info!("evicting a kept conversation of {}", Bytes(session.held_bytes()));
            self.meters.evictions += 1;
            return Room::Made;
        }
        // A conversation stays in memory until it is written.
        if self.disk.as_ref().is_some_and(Disk::is_writing) { Room::Soon } else { Room::None }
    }

    /// Records which files have been written. Waits up to `wait` if none has.
    pub fn wait_for_write(&mut self, wait: Duration) {
        if let Some(disk) = &mut self.disk {
            disk.collect(wait, &mut self.meters);
        }
    }

    /// Writes conversations that were not used for a while.
    pub fn tend(&mut self) {
        let Some(disk) = &mut self.disk else { return };
        disk.collect(Duration::ZERO, &mut self.meters);
        let old = |kept: &&mut Kept| !kept.written && kept.used.elapsed() >= WRITTEN_AFTER;
        for kept in self.kept.iter_mut().filter(old) {
            kept.written = disk.write(kept.tenant, &mut kept.session);
        }
    }

    /// Writes all conversations in the background. Dropping the cache waits until they are written.
    pub fn save(&mut self) {
        let Some(disk) = &mut self.disk else { return };
        disk.collect(Duration::ZERO, &mut self.meters);
        // If not all fit, the newest are written.
        for kept in self.kept.iter_mut().rev().filter(|kept| !kept.written) {
            kept.written = disk.write_later(kept.tenant, &mut kept.session);
        }
    }

    /// The current counters.
    pub fn meters(&self) -> PrefixMeters {
        let (disk_entries, disk_bytes) = self.disk.as_ref().map_or((0, 0), Disk::size);
        PrefixMeters {
            entries: self.kept.len(),
            bytes: self.bytes(),
            disk_entries,
            disk_bytes,
            ..self.meters
        }
    }

    fn bytes(&self) -> u64 {
        self.kept.iter().map(|kept| kept.session.held_bytes()).sum()
    }
}

/// The length of the common prefix.
pub fn common(a: &[TokenId], b: &[TokenId]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Whether a file with this error is useless to all tenants.
fn is_useless(error: &Error) -> bool {
    matches!(error, Error::Format { .. } | Error::Unsupported(_) | Error::Context { .. })
}
