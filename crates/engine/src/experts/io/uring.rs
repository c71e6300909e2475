//! A thread that drives an io_uring: it submits pieces of reads to the kernel and collects their completions.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::squeue::Entry;
use io_uring::types::{Fd, Fixed};
use io_uring::{IoUring, Probe, opcode};
use rustix::event::{EventfdFlags, eventfd};

use super::direct::{DirectFile, DirectSource, is_aligned};
use super::queue::{Piece, Queue};
use super::source::{cannot_read, ends_early};
use super::{Background, OnDone, Threads};

/// Pieces under way at a time on each drive. Fast drives need many; slow ones lose nothing.
pub(super) const DEPTH_PER_DRIVE: usize = 32;

/// The longest buffer that the kernel registers.
const LONGEST_BUFFER: usize = 1 << 30;

/// How often in a row the kernel may ask to retry before a read fails.
const RETRIES: usize = 1000;

/// The completion that says that the thread was woken.
const WAKE: u64 = u64::MAX;

/// Starts the thread.
///
/// # Errors
/// If the kernel refuses io_uring or lacks an operation.
pub(super) fn start(
    source: Arc<DirectSource>,
    buffers: &[(*mut u8, usize)],
    depth: usize,
    on_done: OnDone,
) -> io::Result<Background> {
    let drives = source.drives();
    let places = depth * drives.count();
    // One more entry for the wake-up.
    let ring = IoUring::new(places as u32 + 1)?;
    check_operations(&ring)?;
    let both = |file: &DirectFile| {
        let direct: &File = file.direct.as_ref().unwrap_or(&file.plain);
        [file.plain.as_raw_fd(), direct.as_raw_fd()]
    };
    ring.submitter().register_files(&source.files().iter().flat_map(both).collect::<Vec<_>>())?;
    let (registered, how_buffers) = match register(&ring, buffers) {
        Ok(registered) if registered.is_empty() => (registered, String::new()),
        Ok(registered) => (registered, ", registered buffers".into()),
        Err(e) if e.kind() == io::ErrorKind::OutOfMemory => {
            (Vec::new(), ", buffers not registered (the limit on locked memory is too low: ulimit -l)".into())
        }
        Err(reason) => (Vec::new(), format!(", buffers not registered ({reason})")),
    };
    let how = format!("io_uring, {}{how_buffers}", source.describe());

    let wake_event = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
    let queue = Arc::new(Queue::new(drives, depth, on_done));
    let mut driver = Driver {
        source,
        queue: Arc::clone(&queue),
        wake_event: Arc::clone(&wake_event),
        wake_count: Box::new(0),
        listening: false,
        registered,
        flights: (0..places).map(|_| None).collect(),
        free: (0..places).collect(),
        ring,
    };
    let wake = Box::new(move || wake_up(&wake_event));
    // If the thread cannot be started, dropping the reader finds none to wait for.
    let reader = Background { queue, wake, threads: Threads::new(), how };
    reader.threads.start("forebay-io".into(), move || driver.drive())?;
    Ok(reader)
}

fn check_operations(ring: &IoUring) -> io::Result<()> {
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    if probe.is_supported(opcode::Read::CODE) && probe.is_supported(opcode::ReadFixed::CODE) {
        Ok(())
    } else {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "this kernel's io_uring cannot read into plain buffers",
        ))
    }
}

/// Registers the buffers with the kernel; returns their addresses in order.
fn register(ring: &IoUring, buffers: &[(*mut u8, usize)]) -> io::Result<Vec<Range<usize>>> {
    let cut = |&(start, len): &(*mut u8, usize)| {
        (0..len).step_by(LONGEST_BUFFER).map(move |at| libc::iovec {
            iov_base: start.wrapping_add(at).cast(),
            iov_len: LONGEST_BUFFER.min(len - at),
        })
    };
    let mut parts: Vec<_> = buffers.iter().flat_map(cut).collect();
    parts.sort_by_key(|part| part.iov_base.addr());
    if parts.is_empty() {
        return Ok(Vec::new());
    }
    // SAFETY: the kernel takes the pages at these addresses, or refuses addresses that are not this process's memory.
    // It writes to them only in reads that are submitted later, under the contract of `Reader::submit`.
    unsafe { ring.submitter().register_buffers(&parts)? };
    Ok(parts.iter().map(|part| part.iov_base.addr()..part.iov_base.addr() + part.iov_len).collect())
}

fn wake_up(wake_event: &OwnedFd) {
    // Fails only if the counter is full, and then the thread is about to wake up.
    let _ = rustix::io::write(wake_event, &1u64.to_ne_bytes());
}

/// A piece that the kernel reads.
struct Flight {
    piece: Piece,
    /// Bytes that have arrived.
    done: usize,
    /// How often the kernel asked to retry since the last byte arrived.
    retries: usize,
}

/// What the thread owns. The ring comes first, so that it is dropped before the memory that its requests use.
struct Driver {
    ring: IoUring,
    source: Arc<DirectSource>,
    queue: Arc<Queue>,
    /// An eventfd that submitters write to, to wake the thread.
    wake_event: Arc<OwnedFd>,
    /// Where the kernel stores the counter of the eventfd.
    wake_count: Box<u64>,
    /// Whether a read of the eventfd is under way.
    listening: bool,
    /// The addresses of registered buffers, in order.
    registered: Vec<Range<usize>>,
    /// The pieces under way, by the number in their completion.
    flights: Vec<Option<Flight>>,
    /// Numbers of unused entries of `flights`.
    free: Vec<usize>,
}

impl Driver {
    /// The thread's main loop: runs until the queue is stopped and the kernel no longer writes to this process's
    /// memory.
    fn drive(&mut self) {
        loop {
            let stopped = self.queue.is_stopped();
            if stopped {
                self.queue.cancel_waiting();
                if !self.listening && self.free.len() == self.flights.len() {
                    break;
                }
            } else {
                self.listen();
                self.start_flights();
            }
            if let Err(e) = self.ring.submit_and_wait(1)
                && !self.passes(&e)
            {
                return self.give_up(&e);
            }
            self.land();
        }
        // Otherwise the buffers stay locked until the kernel has cleaned up the ring.
        if !self.registered.is_empty() {
            let _ = self.ring.submitter().unregister_buffers();
        }
    }

    /// Whether a retry may succeed after this error of the ring.
    fn passes(&self, error: &io::Error) -> bool {
        match error.kind() {
            io::ErrorKind::Interrupted => true,
            // The kernel is short of memory, or of space for completions, which `land` frees.
            io::ErrorKind::WouldBlock | io::ErrorKind::ResourceBusy => {
                std::thread::sleep(Duration::from_millis(1));
                true
            }
            _ => false,
        }
    }

    /// Submits a read of the eventfd, which completes when a submitter writes to it.
    fn listen(&mut self) {
        if !self.listening {
            let to: *mut u64 = &mut *self.wake_count;
            let entry = opcode::Read::new(Fd(self.wake_event.as_raw_fd()), to.cast(), 8).build();
            self.push(entry.user_data(WAKE));
            self.listening = true;
        }
    }

    /// Submits the pieces that the queue hands out.
    fn start_flights(&mut self) {
        while let Some(piece) = self.queue.try_take() {
            let number =
                self.free.pop().expect("the queue hands out no more pieces than `flights` has entries");
            let flight = self.flights[number].insert(Flight { piece, done: 0, retries: 0 });
            let entry = request(flight, &self.registered);
            self.push(entry.user_data(number as u64));
        }
    }

    /// Processes completions.
    fn land(&mut self) {
        while let Some((number, result)) = self.next_completion() {
            if number == WAKE {
                self.listening = false;
                continue;
            }
            let number = number as usize;
            let mut flight = self.flights[number].take().expect("a completion belongs to a flight");
            match self.arrived(&mut flight, result) {
                Some(result) => {
                    self.free.push(number);
                    self.queue.finish(flight.piece, result);
                }
                None => {
                    let entry = request(&flight, &self.registered);
                    self.flights[number] = Some(flight);
                    self.push(entry.user_data(number as u64));
                }
            }
        }
    }

    fn next_completion(&mut self) -> Option<(u64, i32)> {
        self.ring.completion().next().map(|entry| (entry.user_data(), entry.result()))
    }

    /// Records a completion; returns `None` if the piece is not finished.
    fn arrived(&self, flight: &mut Flight, result: i32) -> Option<crate::Result<()>> {
        let Piece { file, offset, needed, .. } = flight.piece;
        let at = offset + flight.done as u64;
        let file = &self.source.files()[file.0];
        let failed = |e| Some(Err(cannot_read(&file.path, at, needed - flight.done, e)));
        match usize::try_from(result) {
            Ok(count) => {
                if file.direct.is_none() {
                    file.forget(at, count);
                }
                if count == 0 && flight.done < needed {
                    return failed(ends_early());
                }
                flight.done += count;
                flight.retries = 0;
                (flight.done >= needed).then_some(Ok(()))
            }
            Err(_) => {
                let error = io::Error::from_raw_os_error(-result);
                let again = matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock);
                if !again || flight.retries == RETRIES {
                    return failed(error);
                }
                flight.retries += 1;
                None
            }
        }
    }

    fn push(&mut self, entry: Entry) {
        // SAFETY: the memory of a piece belongs to the reader until its read is reported, which happens after the
        // completion. The eventfd and its counter live as long as this thread, which ends after the last completion.
        // The files are registered.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.expect("the ring has an entry for every piece and for the eventfd");
    }

    /// Handles a failure of the ring itself: all reads fail from now on. Memory that the kernel may still write to
    /// thus never counts as read.
    fn give_up(&mut self, error: &io::Error) {
        tracing::error!("io_uring has failed: {error}");
        let fail = |piece: Piece| {
            let path = &self.source.files()[piece.file.0].path;
            let reason = io::Error::new(
                error.kind(),
                format!("io_uring has failed ({error}): run with Options::io = IoMethod::Pool"),
            );
            let failed = cannot_read(path, piece.offset, piece.needed, reason);
            self.queue.finish(piece, Err(failed));
        };
        self.flights.iter_mut().filter_map(Option::take).for_each(|flight| fail(flight.piece));
        while let Some(piece) = self.queue.take() {
            fail(piece);
        }
        // The kernel may still write to this memory, so it is never freed: neither the counter nor, through the
        // queue's `OnDone`, the memory of reads.
        std::mem::forget((Arc::clone(&self.queue), std::mem::take(&mut self.wake_count)));
    }
}

/// The request for the missing bytes of a piece.
fn request(flight: &Flight, registered: &[Range<usize>]) -> Entry {
    let Flight { piece, done, .. } = flight;
    let (offset, to, len) = (piece.offset + *done as u64, piece.to.wrapping_add(*done), piece.len - done);
    // Files are registered in pairs: the buffered one, then the direct one.
    let file = Fixed((2 * piece.file.0 + usize::from(is_aligned(offset, to, len))) as u32);
    let end = to.addr() + len;
    let buffer = registered.partition_point(|range| range.end < end);
    match registered.get(buffer) {
        Some(range) if range.start <= to.addr() => {
            opcode::ReadFixed::new(file, to, len as u32, buffer as u16).offset(offset).build()
        }
        _ => opcode::Read::new(file, to, len as u32).offset(offset).build(),
    }
}
