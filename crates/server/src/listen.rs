//! Connections: accepting, limiting and closing them.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{Sleep, sleep, timeout};

use crate::guard::Caller;

/// Maximum bytes of a request's head. The same number is buffered of a body and of an answer.
const HEAD_BYTES: usize = 32 << 10;

/// During shutdown, a connection without a request is closed after this time.
const LAST_CALL: Duration = Duration::from_millis(300);

/// The pause after a connection could not be accepted, for example because no file descriptors are left.
const PAUSE: Duration = Duration::from_millis(100);

/// The response to a connection above the limit.
const NO_ROOM: &[u8] = b"HTTP/1.1 429 Too Many Requests\r\ncontent-type: text/plain\r\nretry-after: 5\r\n\
    connection: close\r\ncontent-length: 42\r\n\r\nthis address has too many open connections";

/// The address of the client: an extension of every request.
///
/// All addresses of an IPv6 /64 network count as one, because one customer usually has all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClientAddress(pub IpAddr);

impl ClientAddress {
    pub fn new(address: IpAddr) -> ClientAddress {
        ClientAddress(match address.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << 64))),
            address => address,
        })
    }
}

/// Limits of connections.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// Connections at once. No address gets more of them than are free, so a new address always gets one.
    pub most: usize,
    /// The time for the head of a request, and for the next request of a connection.
    pub head: Duration,
    /// A connection is closed if its client reads nothing of its answer for this time.
    pub stall: Duration,
}

impl Default for Terms {
    fn default() -> Terms {
        Terms { most: 1024, head: Duration::from_secs(30), stall: Duration::from_secs(60) }
    }
}

/// The open connections of a server that [listens](crate::Server::listen). They are accepted as long as the runtime runs.
pub struct Connections {
    leave: watch::Sender<bool>,
    /// Every connection has one, and so has whoever may still take connections.
    guard: Option<mpsc::Sender<()>>,
    /// Closed when the last of them is gone.
    alive: mpsc::Receiver<()>,
}

impl Connections {
    /// Starts to accept connections.
    pub(crate) fn accept(listener: TcpListener, router: Router, terms: Terms) -> Connections {
        let (leave, left) = watch::channel(false);
        let (guard, alive) = mpsc::channel(1);
        tokio::spawn(accept(listener, router, terms, left, guard.downgrade()));
        Connections { leave, guard: Some(guard), alive }
    }

    /// Closes every connection after its running answer. Returns whether all ended within `patience`.
    pub async fn close(&mut self, patience: Duration) -> bool {
        let _ = self.leave.send(true);
        self.guard = None;
        timeout(patience, self.alive.recv()).await.is_ok()
    }
}

/// Accepts connections as long as the program runs, also during shutdown, where requests get an error.
async fn accept(
    listener: TcpListener,
    router: Router,
    terms: Terms,
    left: watch::Receiver<bool>,
    guard: mpsc::WeakSender<()>,
) {
    let places = Arc::new(Places { most: terms.most, taken: Mutex::default() });
    loop {
        let (stream, address) = match listener.accept().await {
            Ok((stream, address)) => (stream, ClientAddress::new(address.ip())),
            Err(error) => {
                tracing::debug!("cannot accept a connection: {error}");
                sleep(PAUSE).await;
                continue;
            }
        };
        let Some(place) = places.take(address) else {
            tracing::debug!("closed a connection from {}: too many connections", address.0);
            // The response is lost if the socket does not accept it at once.
            let _ = stream.try_write(NO_ROOM);
            continue;
        };
        let (router, left, guard) = (router.clone(), left.clone(), guard.upgrade());
        tokio::spawn(async move {
            serve(stream, address, router, terms, left).await;
            drop((place, guard));
        });
    }
}

async fn serve(
    stream: TcpStream,
    address: ClientAddress,
    router: Router,
    terms: Terms,
    mut left: watch::Receiver<bool>,
) {
    // Tokens are small, and clients wait for each of them.
    let _ = stream.set_nodelay(true);
    // The client has already disconnected.
    let Ok(peer) = stream.peer_addr() else { return };
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(terms.head).max_buf_size(HEAD_BYTES);
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(address);
        request.extensions_mut().insert(Caller::connection(peer));
        router.call(request)
    });
    let stream = Impatient { stream, patience: terms.stall, stalled: None };
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let leaving = async {
        let _ = left.wait_for(|left| *left).await;
        // A request that is on its way still gets an error.
        sleep(LAST_CALL).await;
    };
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = leaving => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!("a connection ended with an error: {error}");
    }
}

/// The number of connections of each address.
struct Places {
    most: usize,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    all: usize,
    each: HashMap<ClientAddress, usize>,
}

/// Counts a connection until it is dropped.
struct ConnectionPlace {
    places: Arc<Places>,
    address: ClientAddress,
}

impl Places {
    /// `None` if the address has as many connections as are free.
    fn take(self: &Arc<Places>, address: ClientAddress) -> Option<ConnectionPlace> {
        let mut taken = self.lock();
        let free = self.most - taken.all;
        if taken.each.get(&address).copied().unwrap_or(0) >= free {
            return None;
        }
        taken.all += 1;
        *taken.each.entry(address).or_default() += 1;
        Some(ConnectionPlace { places: Arc::clone(self), address })
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        // No change can fail halfway, so a poisoned lock is harmless.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        let mut taken = self.places.lock();
        taken.all -= 1;
        if let Some(count) = taken.each.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                taken.each.remove(&self.address);
            }
        }
    }
}

/// A stream that fails if its other end reads nothing for too long. The time counts only while there is something to write.
struct Impatient {
    stream: TcpStream,
    patience: Duration,
    /// When writing became impossible.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Impatient {
    fn written(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let patience = self.patience;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(patience)));
        ready!(stalled.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read its answer")))
    }
}

impl AsyncRead for Impatient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Impatient {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.written(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, pieces);
        self.written(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpStream as Client};
    use std::time::Instant;

    use axum::Extension;
    use axum::body::{Body, Bytes};
    use axum::routing::get;

    use super::*;
    use crate::sse::EventBody;

    /// Longer than anything takes here, on any machine.
    const LIMIT: Duration = Duration::from_secs(60);

    /// A server on a thread of its own.
    fn start(terms: Terms) -> SocketAddr {
        // An answer with longer pauses than a client may take to read.
        let slow = move || async move {
            let (sender, receiver) = mpsc::channel::<Bytes>(1);
            tokio::spawn(async move {
                for _ in 0..3 {
                    sleep(terms.stall * 3).await;
                    let _ = sender.send("word ".into()).await;
                }
            });
            Body::new(EventBody(receiver))
        };
        let address = |Extension(address): Extension<ClientAddress>| async move { address.0.to_string() };
        let router = Router::new()
            .route("/address", get(address))
            .route("/large", get(|| async { vec![0_u8; 64 << 20] }))
            .route("/slow", get(slow));
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                sender.send(listener.local_addr().unwrap()).unwrap();
                let _connections = Connections::accept(listener, router, terms);
                std::future::pending::<()>().await;
            });
        });
        receiver.recv().unwrap()
    }

    fn connect(address: SocketAddr) -> Client {
        let client = Client::connect(address).unwrap();
        client.set_read_timeout(Some(LIMIT)).unwrap();
        client
    }

    fn send(address: SocketAddr, path: &str, more: &str) -> Client {
        let mut client = connect(address);
        client.write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\n{more}\r\n").as_bytes()).unwrap();
        client
    }

    /// All that comes until the connection is closed, which it is before the time limit.
    fn read(mut client: Client) -> String {
        let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
        loop {
            match client.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => bytes.extend_from_slice(&buffer[..n]),
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => break,
                Err(error) => panic!("{error}"),
            }
        }
        String::from_utf8(bytes).unwrap()
    }

    /// Waits until a request is answered, which some refusals may come before.
    fn wait_for_a_place(address: SocketAddr) {
        let start = Instant::now();
        while !read(send(address, "/address", "connection: close\r\n")).starts_with("HTTP/1.1 200") {
            assert!(start.elapsed() < LIMIT, "there is no room again");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn who_never_reads_is_let_go() {
        // One address may have one of two connections.
        let terms = Terms { most: 2, stall: Duration::from_millis(300), ..Terms::default() };
        let address = start(terms);
        let deaf = send(address, "/large", "");
        wait_for_a_place(address);
        drop(deaf);
        wait_for_a_place(address);
        // Whoever reads may wait for as long as it takes.
        let slow = read(send(address, "/slow", "connection: close\r\n"));
        assert_eq!(slow.matches("word ").count(), 3, "{slow}");
    }

    #[test]
    fn a_connection_without_a_request_is_closed() {
        let terms = Terms { head: Duration::from_millis(300), ..Terms::default() };
        let address = start(terms);
        assert_eq!(read(connect(address)), "");
        let mut half = connect(address);
        half.write_all(b"GET / HTTP/1.1\r\nhost:").unwrap();
        read(half);
        // One that has been answered and may ask again.
        assert!(read(send(address, "/address", "")).starts_with("HTTP/1.1 200"));
    }

    #[test]
    fn heads_have_an_end() {
        let address = start(Terms::default());
        let fine = format!("connection: close\r\nx: {}\r\n", "x".repeat(HEAD_BYTES / 2));
        assert!(read(send(address, "/address", &fine)).starts_with("HTTP/1.1 200"));
        let mut client = connect(address);
        client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nx: ").unwrap();
        client.write_all(&vec![b'x'; HEAD_BYTES]).unwrap();
        let answer = read(client);
        assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
    }

    #[test]
    fn an_address_has_no_more_connections_than_are_free() {
        let address = start(Terms { most: 8, ..Terms::default() });
        let held: Vec<_> = (0..4).map(|_| send(address, "/address", "")).collect();
        for mut client in held.iter() {
            let mut first = [0; 12];
            client.read_exact(&mut first).unwrap();
            assert_eq!(&first, b"HTTP/1.1 200");
        }
        let refused = read(connect(address));
        assert!(refused.starts_with("HTTP/1.1 429"), "{refused}");
        let (head, body) = refused.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}", body.len())), "{refused}");
        drop(held);
        wait_for_a_place(address);

        let places = Arc::new(Places { most: 8, taken: Mutex::default() });
        let take = |last: u8| places.take(ClientAddress::new([10, 0, 0, last].into()));
        let mut first: Vec<_> = std::iter::from_fn(|| take(1)).collect();
        let second: Vec<_> = std::iter::from_fn(|| take(2)).collect();
        assert_eq!((first.len(), second.len()), (4, 2), "there is one left for somebody else");
        let _third = take(3).unwrap();
        assert!(take(1).is_none());
        first.clear();
        assert!(take(1).is_some());
    }

    #[test]
    fn requests_know_whose_they_are() {
        let address = start(Terms::default());
        assert!(read(send(address, "/address", "connection: close\r\n")).ends_with("127.0.0.1"));
        let client = |text: &str| ClientAddress::new(text.parse().unwrap());
        assert_eq!(client("2001:db8:1:2:3::4"), client("2001:db8:1:2:ffff::"));
        assert_ne!(client("2001:db8:1:2::"), client("2001:db8:1:3::"));
        assert_eq!(client("::ffff:10.0.0.1"), client("10.0.0.1"));
    }
}
