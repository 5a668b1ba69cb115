//! Owns the least pace at which a peer must take what it asked for.
//! Refuses to wait for one that does not: a page of megabytes is kept for it meanwhile.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Sleep, sleep},
};

/// While it is behind, a peer takes this much in this time: 50 KiB/s.
const BYTES: usize = 1 << 20;
const TIME: Duration = Duration::from_secs(20);

/// A connection whose peer must keep up.
pub(super) struct Paced<S> {
    inner: S,
    /// While the peer is behind: until when it must have taken enough, and what it has taken since.
    behind: Option<(Pin<Box<Sleep>>, usize)>,
    time: Duration,
}

impl<S> Paced<S> {
    pub(super) fn new(inner: S) -> Self {
        Self { inner, behind: None, time: TIME }
    }

    fn judge(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if let Poll::Ready(written) = written {
            if let (Some((_, taken)), Ok(bytes)) = (&mut self.behind, &written) {
                *taken += bytes;
                if *taken >= BYTES {
                    self.behind = None;
                }
            }
            return Poll::Ready(written);
        }
        let time = self.time;
        let (end, _) = self.behind.get_or_insert_with(|| (Box::pin(sleep(time)), 0));
        ready!(end.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer takes its answer too slowly")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Paced<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Paced<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write(context, bytes);
        self.judge(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write_vectored(context, bytes);
        self.judge(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    /// What is flushed has been taken, as far as the kernel's buffers go.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.inner).poll_flush(context);
        if flushed.is_ready() {
            self.behind = None;
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[tokio::test]
    async fn a_peer_that_takes_nothing_is_left() {
        let (near, _far) = duplex(64);
        let mut paced = Paced { time: Duration::from_millis(50), ..Paced::new(near) };
        let error = paced.write_all(&[0; 4096]).await.expect_err("nobody reads");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn a_peer_that_keeps_up_is_served_however_long_it_takes() {
        let (near, mut far) = duplex(1 << 16);
        // Longer in all than the time for one part; a busy host is late by parts of a second.
        let mut paced = Paced { time: Duration::from_secs(3), ..Paced::new(near) };
        let reader = tokio::spawn(async move {
            let (mut total, mut part) = (0, vec![0; 1 << 16]);
            while total < 8 << 20 {
                total += far.read(&mut part).await.expect("open");
                tokio::time::sleep(Duration::from_millis(25)).await;
            }
            total
        });
        paced.write_all(&vec![0; 8 << 20]).await.expect("it is taken");
        assert_eq!(reader.await.expect("no panic"), 8 << 20);
    }
}
