//! Conversations that are kept, so that a prompt which begins like one of them is not computed again.
//!
//! They are found by their tokens, and the longest prefix that can be gone back to wins. One that is continued is taken
//! out and comes back longer; of one that only begins alike a fork goes on, so that a system prompt serves many. Each tenant
//! finds its own alone: how much of a prompt was known, or how long it took, tells nobody what others asked. Who was not
//! used for longest leaves memory first, and is written to disk (`disk.rs`), if there is a folder for that.

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

/// A conversation that was not used for so long is written to disk, lest it be lost.
const WRITTEN_AFTER: Duration = Duration::from_secs(20);

/// Tokens that a file must save to be read. Below that, computing is about as fast.
const GAIN: usize = 128;

/// All prompts begin with the same few tokens. To share those costs more than it saves.
pub const WORTH_FORKING: usize = 16;

/// What is kept, and where.
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
    /// The most bytes of memory. They are part of the budget: expert slots give them.
    pub memory: u64,
    /// A folder for what leaves memory, and for the next start.
    pub folder: Option<PathBuf>,
    /// The most bytes of files there, those of other models included.
    pub disk: u64,
    /// Tokens that must be saved for a file to be read.
    pub gain: usize,
}

impl PrefixOptions {
    /// As much memory as the plan has set aside for a conversation, or a sixteenth of all where that is more; 8 GiB in
    /// the folder.
    pub fn new(engine: &Engine, folder: Option<PathBuf>) -> PrefixOptions {
        let plan = engine.plan();
        let memory = plan.kv.max(plan.total() / 16);
        PrefixOptions { memory, folder, disk: 8 << 30, gain: GAIN }
    }
}

/// Counted since the start, but for what is there now.
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

/// The conversations that are kept.
pub struct Prefixes {
    options: PrefixOptions,
    /// The one that was used last comes last.
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
    /// Whether it is on disk, or on its way there.
    written: bool,
}

/// What begins like a text.
#[derive(Clone, Copy, Debug)]
pub struct Match {
    /// Which one.
    pub index: usize,
    /// Tokens that are the same.
    pub same: usize,
    /// How many of them can be gone back to.
    pub reach: usize,
}

/// Whether there is room for those who are being answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// There is more than before.
    Made,
    /// There will be.
    Soon,
    /// Nothing is left to give.
    None,
}

impl Match {
    /// The better of two.
    pub fn best(matches: impl Iterator<Item = Match>) -> Option<Match> {
        matches.max_by_key(|found| (found.reach, found.same))
    }
}

impl Prefixes {
    /// Begins with what is in the folder. Where that cannot be used, a warning says so, and memory alone serves.
    pub fn new(engine: &Engine, options: PrefixOptions) -> Prefixes {
        let mut meters = PrefixMeters::default();
        let disk = options.folder.as_deref().and_then(|folder| {
            let opened = Disk::open(engine, folder, options.disk, &mut meters);
            opened.inspect_err(|error| tracing::warn!("conversations are not kept on disk: {error}")).ok()
        });
        Prefixes { options, kept: Vec::new(), disk, meters }
    }

    /// What a tenant has in memory that begins like this text, of which at least the last token must be computed.
    pub fn find(&self, tenant: Tenant, text: &[TokenId]) -> Option<Match> {
        let of_tenant = self.kept.iter().enumerate().filter(|(_, kept)| kept.tenant == tenant);
        Match::best(of_tenant.map(|(index, kept)| {
            let same = common(kept.session.tokens(), text);
            let reach = kept.session.reach(same.min(text.len() - 1));
            let pays = reach >= WORTH_FORKING || reach >= kept.turn;
            Match { index, same, reach: if pays { reach } else { 0 } }
        }))
    }

    /// What it has on disk that does.
    pub fn find_on_disk(&self, tenant: Tenant, text: &[TokenId]) -> Option<Match> {
        self.disk.as_ref().and_then(|disk| disk.find(tenant, text))
    }

    /// The tokens of one that was found in memory.
    pub fn tokens(&self, index: usize) -> &[TokenId] {
        self.kept[index].session.tokens()
    }

    /// The tokens of one that was found on disk.
    pub fn tokens_on_disk(&self, index: usize) -> &[TokenId] {
        self.disk.as_ref().map_or(&[], |disk| disk.tokens(index))
    }

    /// Whether reading a file pays that saves so many tokens.
    pub fn is_worth_reading(&self, saves: usize) -> bool {
        saves >= self.options.gain
    }

    /// A conversation of the first tokens of one that was found in memory.
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
                Err(error) => tracing::debug!("a kept conversation is given up for its prefix: {error}"),
            }
        }
        kept.session.go_back(found.reach);
        kept.session.hold_for(Purpose::Conversations);
        kept.session
    }

    /// Begins to read one that was found on disk.
    pub fn read(&mut self, index: usize) -> Option<Ticket> {
        self.disk.as_mut().and_then(|disk| disk.read(index))
    }

    /// What was read meanwhile, if it could be; waits a little for it if nothing else is to be done.
    pub fn arrived(&mut self, wait: Duration) -> Vec<(Ticket, Option<Session>)> {
        self.disk.as_mut().map_or_else(Vec::new, |disk| disk.arrived(wait, &mut self.meters))
    }

    /// A prompt's fate: how many of its tokens were not computed again.
    pub fn count(&mut self, reused: usize) {
        if reused > 0 {
            self.meters.hits += 1;
        } else {
            self.meters.misses += 1;
        }
        self.meters.tokens_reused += reused as u64;
    }

    /// Keeps a tenant's conversation, whose last turn begins after so many tokens.
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

    /// Makes room for those who are being answered.
    pub fn give_way(&mut self) -> Room {
        if !self.kept.is_empty() {
            let Kept { session, .. } = self.kept.remove(0);
            tracing::info!("a kept conversation of {} gives way", Bytes(session.held_bytes()));
            self.meters.evictions += 1;
            return Room::Made;
        }
        // What is being written is in memory until it has been.
        if self.disk.as_ref().is_some_and(Disk::is_writing) { Room::Soon } else { Room::None }
    }

    /// Takes note of what has been written; waits for so long if nothing has been.
    pub fn wait_for_write(&mut self, wait: Duration) {
        if let Some(disk) = &mut self.disk {
            disk.collect(wait, &mut self.meters);
        }
    }

    /// Writes what was not used for a while.
    pub fn tend(&mut self) {
        let Some(disk) = &mut self.disk else { return };
        disk.collect(Duration::ZERO, &mut self.meters);
        let old = |kept: &&mut Kept| !kept.written && kept.used.elapsed() >= WRITTEN_AFTER;
        for kept in self.kept.iter_mut().filter(old) {
            kept.written = disk.write(kept.tenant, &mut kept.session);
        }
    }

    /// Writes everything, in the background. Whoever drops it waits for that.
    pub fn save(&mut self) {
        let Some(disk) = &mut self.disk else { return };
        disk.collect(Duration::ZERO, &mut self.meters);
        // Where there is not enough room for all, the newest are written.
        for kept in self.kept.iter_mut().rev().filter(|kept| !kept.written) {
            kept.written = disk.write_later(kept.tenant, &mut kept.session);
        }
    }

    /// What there is and what was done.
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

/// The number of tokens that both begin with.
pub fn common(a: &[TokenId], b: &[TokenId]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Whether a file that led to this error is of no use to anybody.
fn is_useless(error: &Error) -> bool {
    matches!(error, Error::Format { .. } | Error::Unsupported(_) | Error::Context { .. })
}
