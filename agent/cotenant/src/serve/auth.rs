//! Owns whether a user and a password are right.
//! Refuses to let guesses cost more than one core, or more time for a user that exists than for one that does not.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use anyhow::{Context, Result};
use base64::{Engine, prelude::BASE64_STANDARD};
use ring::{digest, hmac, rand::SystemRandom};
use tokio::sync::Semaphore;

/// What was right is remembered: a scraper comes every few seconds, and a check takes 50 ms and more.
const RIGHT: usize = 256;
/// What was wrong is too, apart, so that guesses drive nobody out.
const WRONG: usize = 1024;
/// Checks that wait for the one under way.
const QUEUE: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Right,
    Wrong,
    /// Too many are being checked: nothing is known of this one.
    Busy,
}

/// The users of one web configuration.
pub(super) struct Users {
    hashes: BTreeMap<String, String>,
    /// Compared with for whoever is not there.
    nobody: String,
    /// What is remembered is keyed by it: neither passwords nor anything to guess them from.
    key: hmac::Key,
    seen: Mutex<Seen>,
    /// One check at a time: bcrypt is made to be slow.
    turn: Arc<Semaphore>,
    waiting: AtomicUsize,
}

#[derive(Default)]
struct Seen {
    right: Ring,
    wrong: Ring,
}

#[derive(Default)]
struct Ring(VecDeque<[u8; digest::SHA256_OUTPUT_LEN]>);

impl Ring {
    fn has(&self, tag: &[u8; 32]) -> bool {
        // Tags are keyed and so tell nothing by how long their comparison takes.
        self.0.contains(tag)
    }

    fn note(&mut self, tag: [u8; 32], most: usize) {
        if self.0.len() >= most {
            self.0.pop_front();
        }
        self.0.push_back(tag);
    }
}

/// Leaves the queue when it goes, also when its client is gone first.
struct Place<'a>(&'a AtomicUsize);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Users {
    /// `None` when there are none: then everybody is let in.
    pub(super) fn new(hashes: &BTreeMap<String, String>) -> Result<Option<Self>> {
        let costs = hashes
            .values()
            .filter_map(|hash| hash.parse().ok())
            .map(|parts: bcrypt::HashParts| parts.get_cost());
        let Some(cost) = costs.max() else { return Ok(None) };
        let key = hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new())
            .ok()
            .context("the kernel gives no random numbers")?;
        let nobody = bcrypt::hash("nobody", cost).context("bcrypt")?;
        Ok(Some(Self {
            hashes: hashes.clone(),
            nobody,
            key,
            seen: Mutex::default(),
            turn: Arc::new(Semaphore::new(1)),
            waiting: AtomicUsize::new(0),
        }))
    }

    /// Judges the value of an `Authorization` header.
    pub(super) async fn judge(&self, authorization: &str) -> Verdict {
        let Some((user, password)) = credentials(authorization) else { return Verdict::Wrong };
        let (hash, exists) = match self.hashes.get(&user) {
            Some(hash) => (hash.clone(), true),
            None => (self.nobody.clone(), false),
        };
        let tag = self.tag(&user, &password);
        if let Some(verdict) = self.remembered(&tag) {
            return verdict;
        }
        if self.waiting.fetch_add(1, Ordering::Relaxed) >= QUEUE {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            return Verdict::Busy;
        }
        let place = Place(&self.waiting);
        let Ok(turn) = Arc::clone(&self.turn).acquire_owned().await else { return Verdict::Busy };
        // Whoever was before may have asked the same.
        if let Some(verdict) = self.remembered(&tag) {
            return verdict;
        }
        let checked = tokio::task::spawn_blocking(move || {
            let right = bcrypt::verify(password, &hash).unwrap_or(false);
            // Held until the work is done, whether its client waits or not.
            drop(turn);
            right
        });
        let right = checked.await.unwrap_or(false) && exists;
        drop(place);
        if let Ok(mut seen) = self.seen.lock() {
            if right {
                seen.right.note(tag, RIGHT);
            } else {
                seen.wrong.note(tag, WRONG);
            }
        }
        if right { Verdict::Right } else { Verdict::Wrong }
    }

    fn remembered(&self, tag: &[u8; 32]) -> Option<Verdict> {
        let seen = self.seen.lock().ok()?;
        if seen.right.has(tag) { Some(Verdict::Right) } else { seen.wrong.has(tag).then_some(Verdict::Wrong) }
    }

    fn tag(&self, user: &str, password: &str) -> [u8; 32] {
        let mut context = hmac::Context::with_key(&self.key);
        // The length first: no user and password run into each other.
        context.update(&(user.len() as u64).to_le_bytes());
        context.update(user.as_bytes());
        context.update(password.as_bytes());
        context.sign().as_ref().try_into().unwrap_or([0; 32])
    }
}

/// `Basic` and base64 of `user:password`.
fn credentials(authorization: &str) -> Option<(String, String)> {
    let (scheme, encoded) = authorization.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = String::from_utf8(BASE64_STANDARD.decode(encoded.trim()).ok()?).ok()?;
    let (user, password) = decoded.split_once(':')?;
    Some((user.to_owned(), password.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn basic(user: &str, password: &str) -> String {
        format!("Basic {}", BASE64_STANDARD.encode(format!("{user}:{password}")))
    }

    fn users() -> Users {
        let hash = bcrypt::hash("secret", 6).expect("a hash");
        Users::new(&BTreeMap::from([("alice".to_owned(), hash)])).expect("made").expect("one user")
    }

    #[tokio::test]
    async fn only_the_right_user_with_the_right_password_is_let_in() {
        let users = users();
        for _ in 0..2 {
            assert_eq!(users.judge(&basic("alice", "secret")).await, Verdict::Right);
            // The comparison for whoever is not there is one with a password that somebody knows.
            for (user, password) in
                [("alice", "wrong"), ("bob", "secret"), ("bob", "nobody"), ("", ""), ("alice", "")]
            {
                assert_eq!(users.judge(&basic(user, password)).await, Verdict::Wrong, "{user}:{password}");
            }
        }
        for malformed in ["", "Basic", "Basic ***", "Bearer abc", "Basic YWxpY2U="] {
            assert_eq!(users.judge(malformed).await, Verdict::Wrong, "{malformed}");
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn guesses_are_checked_one_at_a_time_and_drive_nobody_out() {
        let hash = bcrypt::hash("secret", 10).expect("a hash");
        let users =
            Users::new(&BTreeMap::from([("alice".to_owned(), hash)])).expect("made").expect("one user");
        let users = Arc::new(users);
        assert_eq!(users.judge(&basic("alice", "secret")).await, Verdict::Right);
        let guesses: Vec<_> = (0..200)
            .map(|guess| {
                let users = Arc::clone(&users);
                tokio::spawn(async move { users.judge(&basic("alice", &format!("guess {guess}"))).await })
            })
            .collect();
        tokio::time::sleep(Duration::from_millis(20)).await;
        let begun = Instant::now();
        assert_eq!(users.judge(&basic("alice", "secret")).await, Verdict::Right);
        assert!(begun.elapsed() < Duration::from_millis(200), "{:?}", begun.elapsed());
        let mut busy = 0;
        for guess in guesses {
            busy += usize::from(guess.await.expect("no panic") == Verdict::Busy);
        }
        assert!(busy >= 200 - QUEUE - 8, "only {busy} were turned away");
        assert_eq!(users.waiting.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut ring = Ring::default();
        for tag in 0..=u8::MAX {
            ring.note([tag; 32], 16);
        }
        assert_eq!(ring.0.len(), 16);
        assert!(ring.has(&[u8::MAX; 32]) && !ring.has(&[0; 32]));
    }
}
