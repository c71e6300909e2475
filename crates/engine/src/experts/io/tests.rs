//! Tests that every reader must pass, whatever its method.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Condvar, Weak};
use std::time::Instant;

use forebay_testing::{Need, skipped};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use tempfile::{NamedTempFile, TempPath};

use super::*;
use Priority::{Demand, Prefetch};

/// Long enough for any read in these tests, even on a busy machine.
const SOON: Duration = Duration::from_secs(30);

/// Memory that readers write to.
struct Memory {
    start: *mut u8,
    layout: Layout,
}

// SAFETY: all accesses to the bytes follow the contract of `Reader::submit`.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(len: usize) -> Memory {
        let layout = Layout::from_size_align(len, BLOCK).unwrap();
        // SAFETY: no test has a length of zero.
        Memory { start: unsafe { alloc_zeroed(layout) }, layout }
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.start.wrapping_add(offset)
    }

    /// A copy of bytes that no reader writes to.
    fn copy(&self, start: usize, len: usize) -> Vec<u8> {
        assert!(start + len <= self.layout.size());
        // SAFETY: the bytes are initialised, and the caller promises that nobody writes to them.
        unsafe { std::slice::from_raw_parts(self.at(start), len) }.to_vec()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.start, self.layout) };
    }
}

/// A reader, the memory it writes to and what it reports.
struct Fixture {
    name: &'static str,
    reader: Box<dyn Reader>,
    memory: Weak<Memory>,
    reports: Mutex<Receiver<(ReadId, Result<()>)>>,
}

impl Fixture {
    /// Creates a reader whose `OnDone` owns the memory, as in a store.
    fn new(
        name: &'static str,
        len: usize,
        open: impl FnOnce(&[(*mut u8, usize)], OnDone) -> Result<Box<dyn Reader>>,
    ) -> Result<Fixture> {
        let (report, reports) = channel();
        let owned = Arc::new(Memory::new(len));
        let (memory, buffers) = (Arc::downgrade(&owned), [(owned.at(0), len)]);
        let on_done = Arc::new(move |id, result| {
            let _owned = &owned;
            // The receiver may be gone.
            let _ = report.send((id, result));
        });
        Ok(Fixture { name, reader: open(&buffers, on_done)?, memory, reports: Mutex::new(reports) })
    }

    fn over(source: impl ByteSource + 'static, threads: usize, len: usize) -> Fixture {
        Fixture::new("pool", len, |_, on_done| pool(Arc::new(source), threads, on_done)).unwrap()
    }

    fn memory(&self) -> Arc<Memory> {
        self.memory.upgrade().expect("the reader lives")
    }

    /// A read of whole blocks to the memory at `to`.
    fn read(&self, id: u64, offset: usize, to: usize, needed: usize) -> Read {
        let len = needed.next_multiple_of(BLOCK);
        assert!(to + len <= self.memory().layout.size());
        let to = self.memory().at(to);
        Read { id: ReadId(id), file: FileIdx(0), offset: offset as u64, to, len, needed }
    }

    fn submit(&self, reads: &[Read], priority: Priority) {
        // SAFETY: the memory belongs to the reader's `OnDone`, and no test uses bytes that are being read.
        unsafe { self.reader.submit(reads, priority) };
    }

    fn report(&self) -> (u64, Result<()>) {
        let (id, result) = self.reports.lock().unwrap().recv_timeout(SOON).expect("every read is reported");
        (id.0, result)
    }

    /// One demand read to the start of the memory.
    fn fetch(&self, offset: usize, needed: usize) -> Result<Vec<u8>> {
        self.submit(&[self.read(1, offset, 0, needed)], Demand);
        self.report().1.map(|()| self.memory().copy(0, needed))
    }
}

/// All ways to read files. Prints those that the system refuses.
fn all_readers(path: &Path, len: usize) -> Vec<Fixture> {
    let paths = [path.to_owned()];
    let open = |method, buffers: &[_], on_done| open_paths(&paths, method, buffers, on_done);
    let buffered = || Arc::new(DirectSource::buffered(&paths).unwrap());
    let fixtures = [
        Fixture::new("auto", len, |b, done| open(IoMethod::Auto, b, done)),
        Fixture::new("pool", len, |b, done| open(IoMethod::Pool, b, done)),
        Fixture::new("pool, buffered", len, |_, done| pool(buffered(), 3, done)),
        Fixture::new("mmap", len, |b, done| open(IoMethod::Mmap, b, done)),
        Fixture::new("uring", len, |b, done| open(IoMethod::Uring, b, done)),
        Fixture::new("uring, plain buffers", len, |_, done| open(IoMethod::Uring, &[], done)),
        Fixture::new("uring, buffered", len, |b, done| match start_uring(&buffered(), b, &done) {
            Ok(reader) => Ok(Box::new(reader)),
            Err(e) => Err(Error::Unsupported(e.to_string())),
        }),
    ];
    let had = |fixture| match fixture {
        Ok(fixture) => Some(fixture),
        Err(Error::Unsupported(why)) => {
            skipped(Need::Io, why);
            None
        }
        Err(e) => panic!("{e}"),
    };
    fixtures.into_iter().filter_map(had).collect()
}

/// Those of [`all_readers`] that can read a file that shrinks.
fn readers_without_mmap(path: &Path, len: usize) -> Vec<Fixture> {
    all_readers(path, len).into_iter().filter(|fixture| fixture.name != "mmap").collect()
}

fn noise(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    ChaCha8Rng::seed_from_u64(len as u64).fill_bytes(&mut bytes);
    bytes
}

fn file_of(bytes: &[u8]) -> TempPath {
    let file = NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    file.into_temp_path()
}

#[test]
fn all_methods_read_the_same_bytes() {
    let bytes = noise(5_000_123);
    let path = file_of(&bytes);
    for fixture in all_readers(&path, 4 << 20) {
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        let last = bytes.len() / BLOCK * BLOCK;
        let random = (0..40).map(|_| {
            let offset = rng.next_u32() as usize % last / BLOCK * BLOCK;
            let most = (bytes.len() - offset).min(3 << 20);
            (offset, 1 + rng.next_u32() as usize % most)
        });
        let ends =
            [(last, bytes.len() - last), (last, 1), (last - BLOCK, bytes.len() - last + BLOCK), (0, 0)];
        for (offset, needed) in random.chain(ends) {
            let got = fixture.fetch(offset, needed).unwrap();
            assert!(got == bytes[offset..offset + needed], "{}: {needed} bytes at {offset}", fixture.name);
        }
    }
}

#[test]
fn an_early_end_of_a_file_names_file_and_offset() {
    let path = file_of(&noise(10_000));
    for fixture in all_readers(&path, 4 * BLOCK) {
        let says = |offset, needed| fixture.fetch(offset, needed).unwrap_err().to_string();
        let path = path.display();
        let inside = format!(
            "{path}: cannot read 2288 bytes at offset 10000: the file is too short (is it complete?)"
        );
        assert_eq!(says(8192, 4096), inside, "{}", fixture.name);
        let behind =
            format!("{path}: cannot read 9 bytes at offset 40960: the file is too short (is it complete?)");
        assert_eq!(says(40960, 9), behind, "{}", fixture.name);
        assert_eq!(fixture.fetch(0, 10_000).unwrap(), noise(10_000), "{} goes on", fixture.name);
    }
}

#[test]
fn a_file_that_is_truncated_meanwhile_fails_only_what_is_gone() {
    let bytes = noise(4 << 20);
    let path = file_of(&bytes);
    for fixture in readers_without_mmap(&path, 3 << 20) {
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(fixture.fetch(2 << 20, 9999).unwrap(), bytes[2 << 20..][..9999]);
        OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 20).unwrap();
        let message = fixture.fetch(2 << 20, 9999).unwrap_err().to_string();
        assert!(
            message.ends_with(
                "cannot read 9999 bytes at offset 2097152: the file is too short (is it complete?)"
            )
        );
        assert!(fixture.fetch(0, 3 << 20).is_err(), "{}", fixture.name);
        assert_eq!(fixture.fetch(0, 1 << 20).unwrap(), bytes[..1 << 20]);
    }
}

#[test]
fn a_thousand_reads_from_several_threads_are_all_reported() {
    const SLOT: usize = 8 * BLOCK;
    let bytes = noise(3_333_333);
    let path = file_of(&bytes);
    for fixture in all_readers(&path, 1000 * SLOT) {
        let place = |id: usize| (id * 7919 % 700 * BLOCK, 1 + id * 31 % SLOT);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let fixture = &fixture;
                scope.spawn(move || {
                    for ids in (thread * 250..(thread + 1) * 250).collect::<Vec<_>>().chunks(10) {
                        let read = |&id: &usize| fixture.read(id as u64, place(id).0, id * SLOT, place(id).1);
                        let reads: Vec<_> = ids.iter().map(read).collect();
                        fixture.submit(&reads[..7], Demand);
                        fixture.submit(&reads[7..], Prefetch);
                    }
                });
            }
        });
        let mut seen = vec![false; 1000];
        for _ in 0..1000 {
            let (id, result) = fixture.report();
            let (offset, needed) = place(id as usize);
            result.unwrap();
            assert!(!std::mem::replace(&mut seen[id as usize], true), "reported once");
            let got = fixture.memory().copy(id as usize * SLOT, needed);
            assert!(got == bytes[offset..offset + needed], "{}: read {id}", fixture.name);
        }
    }
}

#[test]
fn dropping_cancels_waiting_reads_and_waits_for_those_under_way() {
    const LEN: usize = 256 << 10;
    let path = file_of(&noise(LEN));
    for fixture in all_readers(&path, 64 * LEN) {
        let reads: Vec<_> = (0..64).map(|id| fixture.read(id, 0, id as usize * LEN, LEN)).collect();
        fixture.submit(&reads, Demand);
        let Fixture { name, reader, memory, reports } = fixture;
        drop(reader);
        assert!(memory.upgrade().is_none(), "{name}: the memory is released");
        let results: Vec<_> = reports.into_inner().unwrap().iter().map(|(_, result)| result).collect();
        assert_eq!(results.len(), 64, "{name}: each is reported");
        assert!(results.iter().all(|result| matches!(result, Ok(()) | Err(Error::Cancelled))));
    }
}

#[test]
fn a_model_in_several_files_is_read_from_the_right_one() {
    let contents = [noise(50_000), noise(70_000)];
    let files = [file_of(&contents[0]), file_of(&contents[1])];
    let paths = [files[0].to_path_buf(), files[1].to_path_buf()];
    for method in IoMethod::ALL {
        let open = |buffers: &[_], on_done| open_paths(&paths, method, buffers, on_done);
        let fixture = match Fixture::new(method.name(), 32 * BLOCK, open) {
            Err(Error::Unsupported(_)) => continue,
            opened => opened.unwrap_or_else(|e| panic!("{e}")),
        };
        for (i, bytes) in contents.iter().enumerate() {
            let read = Read { file: FileIdx(i), ..fixture.read(1, BLOCK, 0, 45_000) };
            fixture.submit(&[read], Prefetch);
            fixture.report().1.unwrap();
            assert_eq!(fixture.memory().copy(0, 45_000), bytes[BLOCK..][..45_000], "{method}");
        }
    }
}

#[test]
fn methods_have_names() {
    for method in IoMethod::ALL {
        assert_eq!(method.to_string().parse::<IoMethod>().unwrap(), method);
    }
    let message = "aio".parse::<IoMethod>().unwrap_err().to_string();
    assert_eq!(message, "unknown I/O method \"aio\": use auto, uring, pool or mmap");
}

#[test]
fn a_missing_file_is_named() {
    for method in [IoMethod::Auto, IoMethod::Uring, IoMethod::Pool] {
        let opened = open_paths(&["absent.gguf".into()], method, &[], Arc::new(|_, _| {}));
        assert!(opened.err().unwrap().to_string().starts_with("absent.gguf: cannot open: "));
    }
}

#[test]
fn readers_say_what_is_in_effect_and_why() {
    let file = file_of(&noise(BLOCK));
    let paths = [file.to_path_buf()];
    let open =
        |method| Fixture::new("", BLOCK, |buffers, on_done| open_paths(&paths, method, buffers, on_done));
    let auto = open(IoMethod::Auto).unwrap().reader.describe();
    let pool = open(IoMethod::Pool).unwrap().reader.describe();
    assert!(pool.starts_with("8 threads, "), "{pool}");
    match open(IoMethod::Uring) {
        Ok(uring) => {
            let uring = uring.reader.describe();
            assert!(uring.starts_with("io_uring, ") && uring == auto, "{uring}; {auto}");
        }
        Err(refused) => {
            let refused = refused.to_string();
            assert!(refused.starts_with("io_uring is not available: "), "{refused}");
            assert!(refused.ends_with("run with Options::io = IoMethod::Pool"), "{refused}");
            assert!(auto.starts_with(&format!("{pool} (io_uring is not available: ")), "{auto}");
        }
    }
    eprintln!("{auto}");
}

/// A drive whose bytes are all 1. It returns a few bytes at a time, is interrupted, fails in one block, and can be
/// blocked.
#[derive(Default)]
struct Drive {
    fails_at: Option<u64>,
    gate: Arc<Gate>,
}

/// Lets reads pass or blocks them.
#[derive(Default)]
struct Gate {
    closed: Mutex<bool>,
    changed: Condvar,
    passed: AtomicU64,
}

impl Gate {
    fn set_closed(&self, closed: bool) {
        *self.closed.lock().unwrap() = closed;
        self.changed.notify_all();
    }

    fn pass(&self) {
        self.passed.fetch_add(1, Relaxed);
        let mut closed = self.closed.lock().unwrap();
        while *closed {
            closed = self.changed.wait(closed).unwrap();
        }
    }

    /// Waits until `reads` reads have come to the gate.
    fn wait_for(&self, reads: u64) {
        let start = Instant::now();
        while self.passed.load(Relaxed) < reads {
            assert!(start.elapsed() < SOON);
            std::thread::yield_now();
        }
    }
}

impl ByteSource for Drive {
    fn read_at(&self, _: FileIdx, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        self.gate.pass();
        if self.gate.passed.load(Relaxed).is_multiple_of(5) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        if self.fails_at.is_some_and(|at| (at..at + BLOCK as u64).contains(&offset)) {
            return Err(io::Error::from_raw_os_error(5));
        }
        let count = buffer.len().min(1777);
        buffer[..count].fill(1);
        Ok(count)
    }

    fn path(&self, _: FileIdx) -> &Path {
        Path::new("drive.gguf")
    }
}

#[test]
fn short_and_interrupted_reads_are_continued() {
    let fixture = Fixture::over(Drive::default(), 2, 16 * BLOCK);
    assert_eq!(fixture.fetch(0, 50_000).unwrap(), vec![1; 50_000]);
}

#[test]
fn a_failing_drive_fails_one_read_and_no_other() {
    let drive = Drive { fails_at: Some(3 * BLOCK as u64), ..Drive::default() };
    let fixture = Fixture::over(drive, 4, 8 * BLOCK);
    let reads: Vec<_> =
        (0..8).map(|id| fixture.read(id, id as usize * BLOCK, id as usize * BLOCK, BLOCK)).collect();
    fixture.submit(&reads, Demand);
    for _ in 0..8 {
        let (id, result) = fixture.report();
        match result {
            Ok(()) => assert_ne!(id, 3),
            Err(e) => {
                let message = e.to_string();
                assert!(
                    message.starts_with("drive.gguf: cannot read 4096 bytes at offset 12288: "),
                    "{message}"
                );
                assert_eq!(id, 3);
            }
        }
    }
}

#[test]
fn on_a_slow_drive_demand_overtakes_and_prefetches_can_be_withdrawn() {
    let drive = Drive::default();
    let gate = Arc::clone(&drive.gate);
    let fixture = Fixture::over(drive, 1, 8 * BLOCK);
    let read = |id: u64| fixture.read(id, 0, id as usize * BLOCK, BLOCK);
    gate.set_closed(true);
    fixture.submit(&[read(0), read(1), read(2), read(3)], Prefetch);
    gate.wait_for(1);
    fixture.submit(&[read(4), read(5)], Demand);
    fixture.reader.promote(&[ReadId(3)]);
    assert_eq!(fixture.reader.withdraw(&[ReadId(0), ReadId(1)]), [ReadId(1)]);
    gate.set_closed(false);
    assert_eq!([(); 5].map(|()| fixture.report().0), [0, 4, 5, 3, 2]);
}

#[test]
fn a_stalled_drive_keeps_the_memory_that_it_writes_to() {
    let drive = Drive::default();
    let gate = Arc::clone(&drive.gate);
    let fixture = Fixture::over(drive, 2, 3 * BLOCK);
    gate.set_closed(true);
    let read = |id: u64| fixture.read(id, 0, id as usize * BLOCK, BLOCK);
    fixture.submit(&[read(0), read(1), read(2)], Demand);
    gate.wait_for(2);
    let Fixture { reader, memory, reports, .. } = fixture;
    let start = Instant::now();
    drop(reader);
    assert!(start.elapsed() < PATIENCE + SOON);
    assert!(memory.upgrade().is_some(), "the threads may still write to it");
    gate.set_closed(false);
    let mut results: Vec<_> = reports.into_inner().unwrap().iter().collect();
    results.sort_by_key(|(id, _)| *id);
    assert!(matches!(results[..], [(_, Ok(())), (_, Ok(())), (_, Err(Error::Cancelled))]));
    assert!(memory.upgrade().is_none());
}
