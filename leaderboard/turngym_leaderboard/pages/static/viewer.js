// Plays an episode: one frame at a time, by buttons, slider and keys. Without it the page shows all frames.
"use strict";

document.documentElement.classList.add("js");

document.addEventListener("DOMContentLoaded", () => {
  const frames = [...document.querySelectorAll(".frame")];
  const controls = document.querySelector(".controls");
  const seek = controls.querySelector(".seek");
  const where = controls.querySelector(".where");
  const pace = controls.querySelector(".pace");
  const play = controls.querySelector(".play");
  const help = document.querySelector("dialog.help");
  const chart = document.querySelector(".returns svg");
  let at = 0;
  let timer = null;

  const draw = (wanted) => {
    at = Math.min(Math.max(wanted, 0), frames.length - 1);
    frames.forEach((frame, index) => frame.classList.toggle("current", index === at));
    const frame = frames[at];
    const number = Number(frame.dataset.number);
    seek.value = String(at);
    seek.setAttribute("aria-valuetext", frame.dataset.name);
    where.textContent = frame.querySelector("h2").textContent;
    if (chart) {
      const x = Number(chart.dataset.left) + (number - 1) * Number(chart.dataset.step);
      const now = chart.querySelector(".now");
      now.setAttribute("x1", x);
      now.setAttribute("x2", x);
    }
  };

  const show = (wanted) => {
    draw(wanted);
    history.replaceState(null, "", `#${frames[at].id}`);
  };

  const named = () => Math.max(0, frames.findIndex((frame) => `#${frame.id}` === location.hash));

  const pause = () => {
    clearTimeout(timer);
    timer = null;
    play.classList.remove("playing");
    play.setAttribute("aria-label", "Play");
  };

  const tick = () => {
    show(at + 1);
    if (at === frames.length - 1) pause();
    else timer = setTimeout(tick, Number(pace.value));
  };

  const start = () => {
    if (at === frames.length - 1) show(0);
    play.classList.add("playing");
    play.setAttribute("aria-label", "Pause");
    timer = setTimeout(tick, Number(pace.value));
  };

  const follow = (key) => {
    const link = document.querySelector(`a[data-key="${key}"]`);
    if (link) link.click();
  };

  const go = {
    first: () => (pause(), show(0)),
    back: () => (pause(), show(at - 1)),
    play: () => (timer === null ? start() : pause()),
    on: () => (pause(), show(at + 1)),
    last: () => (pause(), show(frames.length - 1)),
    help: () => (pause(), help.open ? help.close() : help.showModal()),
    next: () => follow("next"),
    before: () => follow("before"),
  };
  const keys = {
    Home: "first",
    ArrowLeft: "back",
    " ": "play",
    ArrowRight: "on",
    End: "last",
    "?": "help",
    n: "next",
    p: "before",
  };

  document.addEventListener("keydown", (event) => {
    const target = event.target;
    const typing = target.matches("select, textarea, input:not([type=range])");
    // Space presses the button that has the focus.
    const pressing = event.key === " " && target.closest("button, a, summary");
    const wanted = keys[event.key];
    if (!wanted || typing || pressing || event.ctrlKey || event.altKey || event.metaKey) return;
    if (help.open && wanted !== "help") return;
    event.preventDefault();
    go[wanted]();
  });
  controls.addEventListener("click", (event) => {
    const button = event.target.closest("[data-go]");
    if (button) go[button.dataset.go]();
  });
  seek.addEventListener("input", () => (pause(), show(Number(seek.value))));
  addEventListener("hashchange", () => draw(named()));

  controls.hidden = false;
  draw(named());
});
