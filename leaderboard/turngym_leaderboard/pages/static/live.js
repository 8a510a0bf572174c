// Keeps what is marked as live up to date while something is played, without moving the reader.
"use strict";

const PAUSE = 5000;

const update = async () => {
  try {
    const answer = await fetch(location.href, { cache: "no-store" });
    if (answer.ok) {
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      for (const part of document.querySelectorAll("[data-live]")) {
        const fresh = page.querySelector(`[data-live="${part.dataset.live}"]`);
        if (fresh && fresh.innerHTML !== part.innerHTML && !part.contains(document.activeElement)) {
          part.replaceChildren(...fresh.childNodes);
        }
      }
      if (!page.querySelector("script[src$='live.js']")) return;
    }
  } catch {
    // The service is away for a moment; the next call asks again.
  }
  setTimeout(update, PAUSE);
};

setTimeout(update, PAUSE);
