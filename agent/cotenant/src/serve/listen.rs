//! Owns connections: how many there are, what a slow or silent one may cost, and which goes when there are too many.
//! Refuses to let anybody be kept out by clients that only hold connections open: the longest idle one makes room.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    future::Future,
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Router, body::Body};
use hyper::{
    Request, Response,
    body::Incoming,
    server::conn::http1,
    service::{Service, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::{AbortHandle, JoinSet},
    time::timeout,
};
use tracing::debug;

use super::{gate::Gate, held::Held, pace::Paced};

/// Connections at once.
const CONNECTIONS: usize = 128;
/// From the last answer, or the connection's begin, to the end of the next request's head.
const HEAD: Duration = Duration::from_secs(30);
/// Of a TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
const HEAD_BYTES: usize = 16 << 10;
const HEADERS: usize = 64;
/// The first byte of a TLS handshake.
const TLS_RECORD: u8 = 0x16;
/// What Go's servers say too, so that a scraper's log is understood.
const PLAIN: &[u8] =
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\
Content-Length: 80\r\n\r\nClient sent an HTTP request to an HTTPS server: use https:// (or cotenant --ca)\n";
/// After an error of `accept`, such as too many descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// One connection, from outside.
struct Open {
    /// Requests whose answers are under way.
    busy: Arc<AtomicUsize>,
    task: AbortHandle,
}

/// Counts for as long as it lives.
struct Busy(Arc<AtomicUsize>);

impl Busy {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Answers until `stop`, then lets what is under way end for `grace`.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    gate: Arc<Gate>,
    stop: impl Future<Output = ()>,
    grace: Duration,
) {
    let mut open: BTreeMap<u64, Open> = BTreeMap::new();
    let mut tasks = JoinSet::new();
    let mut next = 0u64;
    tokio::pin!(stop);
    loop {
        let stream = tokio::select! {
            () = &mut stop => break,
            Some(ended) = tasks.join_next(), if !tasks.is_empty() => {
                if let Ok(id) = ended {
                    open.remove(&id);
                }
                continue;
            }
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    debug!(%error, "a connection could not be accepted");
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            },
        };
        open.retain(|_, one| !one.task.is_finished());
        if open.len() >= CONNECTIONS && !make_room(&mut open) {
            // Every connection is being answered: this one is too many.
            continue;
        }
        let busy = Arc::new(AtomicUsize::new(0));
        let (router, gate, id) = (router.clone(), Arc::clone(&gate), next);
        next += 1;
        let counted = Arc::clone(&busy);
        let task = tasks.spawn(async move {
            if let Err(error) = connection(stream, router, &gate, counted).await {
                debug!(%error, "a connection ended");
            }
            id
        });
        open.insert(id, Open { busy, task });
    }
    drop(listener);
    // Who has asked nothing waits for nothing.
    for one in open.values().filter(|one| one.busy.load(Ordering::Relaxed) == 0) {
        one.task.abort();
    }
    let _ = timeout(grace, async { while tasks.join_next().await.is_some() {} }).await;
}

/// The oldest connection that is not being answered goes. Ids grow, so the first is the oldest.
fn make_room(open: &mut BTreeMap<u64, Open>) -> bool {
    let idle = open.iter().find(|(_, one)| one.busy.load(Ordering::Relaxed) == 0).map(|(id, _)| *id);
    let Some(one) = idle.and_then(|id| open.remove(&id)) else { return false };
    one.task.abort();
    true
}

async fn connection(
    stream: TcpStream,
    router: Router,
    gate: &Gate,
    busy: Arc<AtomicUsize>,
) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let rules = gate.rules();
    let Some(tls) = &rules.tls else { return answer(Paced::new(stream), router, busy).await };
    let handshake = async {
        let mut first = [0];
        if stream.peek(&mut first).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if first[0] != TLS_RECORD {
            let mut stream = stream;
            stream.write_all(PLAIN).await?;
            stream.shutdown().await?;
            return Err(io::Error::new(io::ErrorKind::InvalidData, "HTTP on a TLS port"));
        }
        tls.acceptor.accept(Paced::new(stream)).await
    };
    let mut stream = timeout(HANDSHAKE, handshake).await.map_err(|_| io::ErrorKind::TimedOut)??;
    if !tls.admits(stream.get_ref().1.peer_certificates()) {
        stream.shutdown().await?;
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "no name of the certificate is in client_allowed_sans",
        ));
    }
    drop(rules);
    answer(stream, router, busy).await
}

async fn answer<S>(stream: S, router: Router, busy: Arc<AtomicUsize>) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let pages = TowerToHyperService::new(router);
    let service = service_fn(move |request: Request<Incoming>| {
        let (answering, answered) = (Busy::new(&busy), pages.call(request));
        async move {
            let response: Response<Body> = answered.await?;
            Ok::<_, Infallible>(response.map(|body| Held::new(body, answering)))
        }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_header_size(HEAD_BYTES)
        .max_headers(HEADERS)
        .serve_connection(TokioIo::new(stream), service)
        .await
        .map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_to_plain_http_has_the_length_that_it_says() {
        let text = std::str::from_utf8(PLAIN).expect("text");
        let (head, body) = text.split_once("\r\n\r\n").expect("a head");
        assert!(head.contains(&format!("Content-Length: {}", body.len())), "{}", body.len());
    }
}
