// Before the first paint, so that no page flashes in the wrong colours: a classic script, in the head.
document.documentElement.dataset.theme = localStorage.getItem("vserve.theme") ?? "auto";
