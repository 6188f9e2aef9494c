# The first process of the machine. $HOSTS holds the unpacked packages, $PYTHON the interpreter of the campaign.
export PATH=$HOSTS/root/usr/sbin:$HOSTS/root/sbin:/usr/sbin:/usr/bin:/sbin:/bin:$HOSTS/root/bin
export LD_LIBRARY_PATH=$HOSTS/root/lib/x86_64-linux-gnu:$HOSTS/root/usr/lib/x86_64-linux-gnu
export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs run /run
mount -t tmpfs mnt /mnt
mount -t tmpfs lib /var/lib
mkdir -p /var/lib/nfs/v4recovery /var/lib/nfs/rpc_pipefs /var/lib/nfs/sm /var/lib/nfs/sm.bak /run/netns /run/rpc_pipefs /mnt/exported
touch /var/lib/nfs/{etab,rmtab,state,xtab}
for module in nfsd nfsv3 nfsv4 veth; do $HOSTS/modprobe -d $HOSTS/modules $module || echo "no module $module"; done
ip link set lo up
echo 1 > /proc/sys/net/ipv4/ip_forward
mount -t ext4 /dev/ubda /mnt/exported && chmod 777 /mnt/exported
mount -t nfsd nfsd /proc/fs/nfsd
# As a server with 4 GiB of memory and more: the largest transfer of NFS.
echo 1048576 > /proc/fs/nfsd/max_block_size
# rpcbind and rpc.statd exit without the users that their packages make.
(cat /etc/passwd; echo "_rpc:x:0:0::/run:/bin/false"; echo "statd:x:0:0::/run:/bin/false") > /run/passwd
mount --bind /run/passwd /etc/passwd
rpcbind
for i in {1..50}; do rpcinfo -p 127.0.0.1 > /dev/null 2>&1 && break; sleep 0.1; done
rpc.statd --no-notify
for i in {1..50}; do rpcinfo -p 127.0.0.1 | grep -q status && break; sleep 0.1; done
exportfs -o rw,no_root_squash,no_subtree_check,fsid=0,sync '*:/mnt/exported' 2> /dev/null
rpc.mountd 2> /dev/null
# Without -G and -L the first open waits 90 s for clients of a server before this one.
rpc.nfsd -G 10 -L 10 -V 3 -V 4 8
bash $HOSTS/command.sh
sync
# 0x4321fedc is LINUX_REBOOT_CMD_POWER_OFF.
$PYTHON -c "import ctypes; ctypes.CDLL(None).reboot(0x4321fedc)"
