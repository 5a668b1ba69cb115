//! Owns the watch against a server over real TLS that refuses, forgets, breaks off, and comes back as another one.

#[path = "../../../../tests/node/tests/apiserver/mod.rs"]
mod fake;

use fake::{Fake, Pod};

use super::*;

const UID: &str = "6a1b2c3d-0000-4444-8888-123456789abc";
const OTHER: &str = "6a1b2c3d-0000-4444-8888-123456789abd";

fn pod(uid: &str, name: &str, team: &str) -> Pod {
    Pod::new(uid, "n", name, &[("team", team)])
}

fn start() -> Fake {
    Fake::start(vec![pod(UID, "p", "blue")]).unwrap()
}

fn watch(fake: &Fake) -> PodWatch {
    PodWatch::spawn(ApiConfig {
        server: fake.url(),
        credentials: fake.credentials().to_owned(),
        node: "gpu-1".into(),
        deadline: Duration::from_secs(5),
        wishes: Wishes { labels: vec!["team".into()], annotations: vec![], tenant_label: "team".into() },
    })
    .unwrap()
}

fn until(watch: &PodWatch, what: &str, met: impl Fn(&Roster) -> bool) -> Arc<Roster> {
    let begun = Instant::now();
    loop {
        let roster = watch.heard.latest();
        if met(&roster) {
            return roster;
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "no {what}: {roster:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn named(roster: &Roster, uid: &str) -> Option<String> {
    roster.pod(uid).map(|name| name.pod)
}

#[test]
fn c04_c82_one_nodes_pods_are_listed_by_pages_then_watched() {
    let fake = start();
    fake.with(|state| state.pods.push(pod(OTHER, "q", "blue")));
    let watch = watch(&fake);
    let roster = until(&watch, "watch", |roster| roster.watching);
    assert_eq!((named(&roster, UID).as_deref(), named(&roster, OTHER).as_deref()), (Some("p"), Some("q")));
    assert_eq!((roster.team(UID, None), roster.age()), (Team::Known("blue".into()), Some(Duration::ZERO)));
    let asked = fake.asked();
    assert_eq!(asked.len(), 3, "{asked:?}");
    assert!(asked.iter().all(|query| query.starts_with("/api/v1/pods?fieldSelector=spec.nodeName%3Dgpu-1&")));
    assert!(
        asked[0].contains("resourceVersion=0&limit=500") && asked[1].contains("continue=a%2Bb%3D&limit=500")
    );
    assert!(asked[2].contains("watch=true") && asked[2].contains("resourceVersion=10&"));
    fake.send("ADDED", &pod(&OTHER.replace("abd", "abe"), "r", "red").object(11));
    fake.send("DELETED", &pod(UID, "p", "blue").object(12));
    let roster = until(&watch, "events", |roster| roster.count() == 2 && roster.team_of("n", "r").is_some());
    assert_eq!((roster.team_of("n", "r"), named(&roster, UID).as_deref()), (Some("red"), Some("p")));
}

#[test]
fn an_outage_takes_no_name_and_a_new_server_is_listed_anew() {
    let mut fake = start();
    let watch = watch(&fake);
    until(&watch, "watch", |roster| roster.watching);
    fake.stop();
    let roster = until(&watch, "outage", |roster| !roster.watching && roster.source.failures >= 2);
    assert_eq!((named(&roster, UID).as_deref(), roster.team_of("n", "p")), (Some("p"), Some("blue")));
    assert!(roster.age() > Some(Duration::ZERO));
    assert!(roster.source.error.as_ref().unwrap().contains("cannot be reached"), "{roster:?}");
    // Another certificate, other versions, of which the old one is none.
    fake.asked();
    fake.with(|state| {
        state.version = 3;
        state.pods = vec![pod(OTHER, "q", "blue")];
        state.refusals = vec![(504, "Timeout: Too large resource version", None)];
    });
    fake.serve().unwrap();
    let roster = until(&watch, "new server", |roster| roster.watching && named(roster, OTHER).is_some());
    assert!(named(&roster, UID).is_some() && roster.source.error.is_none() && roster.remedy.is_empty());
    let asked = fake.asked();
    assert!(
        asked[0].contains("resourceVersion=10&") && asked.last().unwrap().contains("resourceVersion=3&"),
        "{asked:?}"
    );
}

#[test]
fn what_the_server_forgot_is_listed_again_and_what_broke_off_goes_on() {
    let fake = start();
    let watch = watch(&fake);
    let before = until(&watch, "watch", |roster| roster.watching).tries;
    fake.send("BOOKMARK", &pod("", "", "").object(20));
    until(&watch, "bookmark", |roster| roster.tries > before);
    fake.asked();
    fake.cut();
    until(&watch, "cut", |roster| roster.source.failures == 1);
    until(&watch, "watch", |roster| roster.watching);
    assert_eq!(fake.asked().iter().filter(|query| query.contains("resourceVersion=20&")).count(), 1);
    fake.with(|state| {
        state.version = 30;
        state.pods[0].name = "renamed".into();
    });
    fake.send("ERROR", r#"{"kind":"Status","code":410,"message":"too old resource version: 20 (25)"}"#);
    until(&watch, "list", |roster| roster.watching && named(roster, UID).as_deref() == Some("renamed"));
    let asked = fake.asked();
    assert!(asked.len() == 2 && asked[0].contains("resourceVersion=0"), "{asked:?}");
    // The same as an answer instead of an event.
    fake.with(|state| state.refusals = vec![(410, "Expired", None)]);
    fake.end();
    until(&watch, "second list", |roster| roster.source.failures >= 3 && roster.watching);
    let asked = fake.asked();
    assert!(asked.iter().any(|query| query.contains("resourceVersion=0&limit")), "{asked:?}");
}

#[test]
fn a_server_that_asks_for_patience_gets_it_and_a_refusal_names_the_role() {
    let fake = start();
    fake.with(|state| state.refusals = vec![(429, "slow down", Some(2)), (403, "pods is forbidden", None)]);
    let begun = Instant::now();
    let watch = watch(&fake);
    let roster = watch.heard.first();
    assert!(roster.source.error.as_ref().unwrap().contains("429") && roster.age().is_none());
    std::thread::sleep(Duration::from_millis(1500).saturating_sub(begun.elapsed()));
    assert_eq!(fake.asked().len(), 1);
    let roster = until(&watch, "refusal", |roster| roster.tries == 2);
    assert!(begun.elapsed() >= Duration::from_secs(2));
    assert!(roster.source.error.as_ref().unwrap().contains("pods is forbidden"));
    assert!(roster.remedy.contains("api-watch.yaml"), "{}", roster.remedy);
    let roster = until(&watch, "watch", |roster| roster.watching);
    assert_eq!((roster.source.failures, roster.source.error.as_deref()), (2, None));
}

#[test]
fn a_replaced_token_is_the_next_one_that_is_shown() {
    let fake = start();
    let watch = watch(&fake);
    until(&watch, "watch", |roster| roster.watching);
    fake.with(|state| state.token = "two".into());
    fake.cut();
    let roster =
        until(&watch, "refusal", |roster| roster.source.error.as_ref().is_some_and(|of| of.contains("401")));
    assert!(roster.remedy.contains("token") && named(&roster, UID).is_some());
    fake.write_token("two").unwrap();
    until(&watch, "watch", |roster| roster.watching);
}

#[test]
fn c111_an_answer_without_an_end_is_dropped() {
    let fake = start();
    fake.with(|state| state.endless = true);
    let watch = watch(&fake);
    let roster = watch.heard.first();
    assert!(roster.source.error.as_ref().unwrap().contains("length limit"), "{:?}", roster.source);
    fake.with(|state| state.endless = false);
    until(&watch, "watch", |roster| roster.watching);
    // The same within a watch.
    let long = "x".repeat(1 << 20);
    for _ in 0..6 {
        fake.text(&long);
    }
    until(&watch, "cut", |roster| roster.source.error.as_ref().is_some_and(|of| of.contains("longer than")));
    until(&watch, "watch", |roster| roster.watching);
}

#[test]
fn nobody_waits_for_the_thread() {
    let fake = start();
    let watch = watch(&fake);
    until(&watch, "watch", |roster| roster.watching);
    let begun = Instant::now();
    drop(watch);
    assert!(begun.elapsed() < Duration::from_millis(500));
}

#[test]
fn pauses_grow_and_end_at_a_most_and_are_never_nothing() {
    assert_eq!(pause(1, None, 1.0), PAUSE);
    assert_eq!(pause(0, None, 1.0), PAUSE);
    assert_eq!(pause(3, None, 1.0), PAUSE * 4);
    assert_eq!(pause(u32::MAX, None, 1.0), MOST_PAUSE);
    assert_eq!(pause(u32::MAX, None, 0.0), MOST_PAUSE / 2);
    assert!(pause(1, None, 0.0) >= Duration::from_millis(250));
    assert!(pause(1, Some(Duration::from_mins(1)), 0.5) > Duration::from_mins(1));
    assert!((0..100).map(|_| chance()).all(|chance| (0.0..=1.0).contains(&chance)));
}
