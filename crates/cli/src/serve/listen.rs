//! Connections: taken, kept from standing in each other's way, and let go.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::{sleep, timeout};

/// Connections at once. Others wait to be taken.
const MOST: usize = 1024;

/// The head of a request may take so long, and so may the next request of a connection.
const HEAD: Duration = Duration::from_secs(30);

/// When the server leaves, a connection without a request is closed after this.
const LAST_CALL: Duration = Duration::from_millis(300);

/// When a connection cannot be taken, for want of file descriptors perhaps, some will end soon.
const PAUSE: Duration = Duration::from_millis(100);

/// Who is at the other end of the connection by which a request came.
#[derive(Clone, Copy)]
pub struct Peer(pub SocketAddr);

/// What waits for the end of all connections.
pub struct Connections {
    leave: watch::Sender<bool>,
    /// Every connection has one, and so has whoever may still take connections.
    guard: mpsc::Sender<()>,
    /// Closed when the last of them is gone.
    alive: mpsc::Receiver<()>,
}

impl Connections {
    /// Takes connections from now on.
    pub fn accept(listener: TcpListener, router: Router) -> Connections {
        let (leave, left) = watch::channel(false);
        let (guard, alive) = mpsc::channel(1);
        tokio::spawn(accept(listener, router, left, guard.downgrade()));
        Connections { leave, guard, alive }
    }

    /// Lets every connection end after what it is answering; gives up waiting after `patience`.
    pub async fn close(self, patience: Duration) -> bool {
        let Connections { leave, guard, mut alive } = self;
        let _ = leave.send(true);
        drop(guard);
        timeout(patience, alive.recv()).await.is_ok()
    }
}

/// Takes connections for as long as the program runs: those that come while others end are told why they get nothing.
async fn accept(
    listener: TcpListener,
    router: Router,
    left: watch::Receiver<bool>,
    guard: mpsc::WeakSender<()>,
) {
    let places = Arc::new(Semaphore::new(MOST));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!("a connection could not be taken: {error}");
                sleep(PAUSE).await;
                continue;
            }
        };
        let (router, left, guard) = (router.clone(), left.clone(), guard.upgrade());
        tokio::spawn(async move {
            serve(stream, router, left).await;
            drop((place, guard));
        });
    }
}

async fn serve(stream: TcpStream, router: Router, mut left: watch::Receiver<bool>) {
    // Tokens are small, and each is waited for.
    let _ = stream.set_nodelay(true);
    // Whoever has gone already is nobody.
    let Ok(peer) = stream.peer_addr() else { return };
    let router = router.layer(Extension(Peer(peer)));
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD);
    let connection = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    tokio::pin!(connection);
    let leaving = async {
        let _ = left.wait_for(|left| *left).await;
        // What is on its way is still heard, and told that it comes too late.
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
        tracing::debug!("a connection ended: {error}");
    }
}
